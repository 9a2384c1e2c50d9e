"""What one run of a case left, for people: error maps as text and pictures, and all the numbers."""
