"""How the command that deploys tells the app's module what to deploy: Modal imports that module by itself."""

APP_VARIABLE = "ELASTIC_MODAL_APP"
"""The app's name."""
PACKAGES_VARIABLE, MODULES_VARIABLE = "ELASTIC_MODAL_PACKAGES", "ELASTIC_MODAL_MODULES"
"""What is installed in its image besides, and what is put into it."""
