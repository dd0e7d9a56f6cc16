"""Elastic from within other people's trainers, whose processes need none of it but a module of this room."""
