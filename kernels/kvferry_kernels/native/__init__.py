"""The C++ operators as a library: its sources, and how it is built, kept and loaded (``provide.open_library``).

The library is plain C++ with a C interface; it links to neither torch nor Python. It comes from one of three places:

1. ``prebuilt/`` in this package: made when an image is built, for several levels of x86-64 (``prebuild``);
2. the user's cache (``cache``), keyed by a hash of sources, flags, compiler and CPU;
3. the system's C++ compiler, once, for this very CPU (``compiler``); the result is put in the cache.

Where none of these gives a library, there is a reason in words and the engine computes with torch alone.
"""
