"""What the lessons train.

text.py       a text, as bytes
gpt.py        a small GPT on bytes
images.py     small photographs of clothes
networks.py   six image networks for them
"""
