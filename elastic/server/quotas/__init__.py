"""What runs may have at once and may spend: pure arithmetic on rows that others read."""
