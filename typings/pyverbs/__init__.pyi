# What we use of pyverbs, 44 and 59 alike; the rest is left out.
