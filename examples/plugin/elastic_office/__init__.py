"""What an office lends to Elastic, and what it asks of it: one plug-in of each kind."""
