"""How steps reach ranks."""
