"""What the lessons train.

gpt.py        a small GPT on bytes
images.py     small photographs
networks.py   six image networks for them
"""
