"""The journal: the one thing that the training process and the node agent share."""
