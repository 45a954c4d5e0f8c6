"""The commands of ``kvferry``, one file each: its arguments, and what it does."""
