"""What runs on a rank: it joins the group, fills the namespace, and answers the notebook. Imports torch."""

from __future__ import annotations
