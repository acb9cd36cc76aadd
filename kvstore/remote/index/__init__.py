"""What the directory knows: which nodes hold which blocks."""
