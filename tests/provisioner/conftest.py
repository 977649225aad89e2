from support.fixtures import jupyter_env, manager, soon, spec

__all__ = ["jupyter_env", "manager", "soon", "spec"]
