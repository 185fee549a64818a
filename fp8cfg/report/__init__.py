"""Reports for users: headers of runs, exports, templates, differences and explanations of keys.

Importing this package does not load torch.
"""

from __future__ import annotations
