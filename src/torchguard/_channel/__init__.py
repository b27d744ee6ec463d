"""A flags tensor and all that can be done with it inside a graph."""
