"""Doors: the routes of other people's trainers, which send requests and offer weights in protocols of their own."""
