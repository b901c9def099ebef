"""Data sets and data modules. Only this room, training and the command line import lightning."""
