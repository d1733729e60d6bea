"""The client's optional native part: that of the records, as ../setup.py builds it."""

import importlib.util
from pathlib import Path

from setuptools import setup

whole = importlib.util.spec_from_file_location("asyncrl_setup", Path(__file__).resolve().parent.parent / "setup.py")
package = importlib.util.module_from_spec(whole)
whole.loader.exec_module(package)
setup(ext_modules=[package.records("..")])
