from hypothesis import settings

# How long an example takes depends on what else the machine does; pytest's timeout bounds the whole test.
settings.register_profile("elastic", deadline=None)
settings.load_profile("elastic")
