"""What runs on a node: standard library only, Python 3.8 and newer, no root, no daemon, no open port."""
