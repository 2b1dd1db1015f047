INSERT INTO schemas VALUES (9, x'00ff');
INSERT INTO bin VALUES (x'000102030405060708090a0b0c0d0e0f', 'orders', 'kept', 5, 0, 9, '{"retention.ms":-1}', 77, x'', '[1,2]', '[[0,0,10,"0-8191",[]],[1,0,0,"8192-16383",[[0,7]]]]', 123, 456, 789);
