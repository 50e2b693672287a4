"""The pages of `trimcp top --web` and `trimcp inspect --web`, and the site on this machine that serves them."""
