"""Slots: device rows for some of the experts, the tables that say which, and what fills them."""
