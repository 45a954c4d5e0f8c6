"""Operators of the engine, each beside its reference in plain torch.

A folder is one operator: ``reference.py`` says what it computes, ``native.py`` computes it in C++ on the CPU, with the
library before the same arguments. ``native`` builds, keeps and loads that library.
"""
