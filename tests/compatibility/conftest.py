"""What these tests share with those of the waiting room."""

from support.fixtures import classroom, manager

__all__ = ["classroom", "manager"]
