"""The key of the tests' trainer, and who believes it."""

from elastic.weights.signing import SigningKey

KEY = SigningKey()
TRUST = KEY.trust("run")
