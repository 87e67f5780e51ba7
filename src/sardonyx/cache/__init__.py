"""What is kept for reuse: sessions in memory, what engines compiled on disk."""
