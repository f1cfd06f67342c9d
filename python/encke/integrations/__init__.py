"""Other people's libraries on Encke: :mod:`encke.integrations.transformers`."""
