from support.fixtures import classroom, manager

__all__ = ["classroom", "manager"]
