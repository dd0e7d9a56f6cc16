"""Sign-in by OpenID Connect, and what follows from what an identity provider says of people."""
