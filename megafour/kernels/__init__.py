"""The hot operations behind one interface each, with a backend per library."""
