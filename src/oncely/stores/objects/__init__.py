"""Local folders and object stores: whole files below one root."""
