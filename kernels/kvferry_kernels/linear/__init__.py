"""Products with a weight: alone, added to their output, or two of them joined by a gate."""
