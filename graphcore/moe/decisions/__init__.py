"""Decisions: what a call does, from values alone; nothing here touches a driver."""
