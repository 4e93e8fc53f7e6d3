"""Campaigns that search flows: proposed, checked, scored, recorded (sparrow flow loop)."""
