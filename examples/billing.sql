-- The tables of billing.py.
CREATE TABLE bills (id bigint PRIMARY KEY, customer text NOT NULL, total numeric(12, 2) NOT NULL);
CREATE TABLE debts (customer text PRIMARY KEY, total numeric(12, 2) NOT NULL);
