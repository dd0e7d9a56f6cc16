"""How long what runs leave is kept, and its removal."""
