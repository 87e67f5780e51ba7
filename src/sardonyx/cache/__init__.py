"""Caches: sessions in memory, compiled artifacts on disk."""
