"""Parameters on the host: fetched ahead of their module and ahead of their use in backward, dropped after."""
