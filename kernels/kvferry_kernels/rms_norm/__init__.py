"""Root mean square normalization (arXiv:1910.07467)."""
