"""What everything here uses and nobody imports from outside: small tools below all other layers."""
