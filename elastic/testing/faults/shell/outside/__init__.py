"""A run that others train: a client outside asks for turns and offers weights, and checks what it is given."""
