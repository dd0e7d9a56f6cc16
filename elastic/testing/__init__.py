"""What tests of engines need, ours and third parties'."""
