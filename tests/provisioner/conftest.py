from support.fixtures import jupyter_env, manager

__all__ = ["jupyter_env", "manager"]
