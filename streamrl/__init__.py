"""The vocabulary and the mathematics of streamrl; no process of its own."""
