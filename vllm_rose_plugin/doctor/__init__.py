"""What ``rose doctor`` looks at (facts), and what it makes of it (findings)."""
