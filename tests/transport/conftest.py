from __future__ import annotations

import pytest
from transport_helpers import own_name

name = pytest.fixture(own_name, name="name")
