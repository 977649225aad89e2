"""The pool of one machine: the store opened in the process of whoever asks, no daemon."""
