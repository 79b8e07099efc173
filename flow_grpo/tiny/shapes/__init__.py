"""The embedded model of shapes: scenes and edits on the layout of FLUX.2-klein, and the recipe that makes it."""
