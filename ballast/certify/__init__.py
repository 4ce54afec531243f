"""Certify: is this data set, reward or environment worth a GPU?

mine.yaml --subject--> Subject --data_checks, reward_checks, ...--> Certificate --> a page, certificate.json
"""
