"""Values, errors and checks that every other room uses."""
