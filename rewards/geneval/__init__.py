"""GenEval: whether the objects of a prompt are in the image, in number, color and position (arXiv 2310.11513)."""
