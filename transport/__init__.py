"""Wire messages, codec and channels. Imports nothing of ours."""
