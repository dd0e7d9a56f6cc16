"""What projects hand in: runs, which are checked whole before anything is kept, and files."""
